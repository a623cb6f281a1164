"""Problems that tests and `python -m jaxrunner.bench --kernels` give kernels."""

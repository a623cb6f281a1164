"""Model families, one file each. Imported as `jaxrunner.models`."""

if __name__ != "jaxrunner.models":
    raise ImportError(f"import jaxrunner.models, not {__name__}")

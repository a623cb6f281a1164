"""An engine on other devices than it was built on."""

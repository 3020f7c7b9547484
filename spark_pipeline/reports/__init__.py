"""The scheduled reports. registry.py lists them; run.py runs them."""

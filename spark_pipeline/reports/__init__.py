"""The scheduled reports: one module each, thin. registry.py lists them; run.py runs them."""

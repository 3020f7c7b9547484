"""Large bodies and answers, in slices between the requests of others."""

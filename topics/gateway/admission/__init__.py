"""Which requests are taken now, which wait, which are refused."""

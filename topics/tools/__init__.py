"""What verbs do, apart from how they talk."""

"""What verbs share."""

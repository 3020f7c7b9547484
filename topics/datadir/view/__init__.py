"""The whole folder, topic by topic."""

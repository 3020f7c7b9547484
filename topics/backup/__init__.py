"""Backups of a data folder: many in one repository, each complete in itself, sharing what they have in common.

moment.py says what a backup holds, repository.py where it is kept, catalog.py how it is written down."""

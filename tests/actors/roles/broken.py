"""Half of a version, as a deployment may leave it."""

raise ImportError("roles.broken needs what is not installed")

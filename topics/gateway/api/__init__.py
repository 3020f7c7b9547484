"""The endpoints: from a request to a call or a response."""

"""Serving without a framework: tenants, limits, names, OpenAI's wire format and the core that joins them. No Ray."""

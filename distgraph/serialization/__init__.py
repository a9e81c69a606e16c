"""Files and documents: read within limits, checked against a schema, and written atomically."""

"""Files and documents: read within limits, checked against a schema, written whole or not at all."""

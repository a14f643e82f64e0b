"""The only SQL of the product: schema, databases, the append side and the read side."""

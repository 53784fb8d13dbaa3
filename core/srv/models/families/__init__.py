"""Families of models that srv has no layers of: what they are made of, from the fields of their configurations."""

"""What follows from the facts of a model before it is built: its layers, what ranks divide, rules of its checkpoint."""

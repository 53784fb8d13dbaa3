"""What the protocols share: from a conversation to the events of a reply, and their fields."""

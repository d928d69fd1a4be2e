"""What the ranks do once they have met. Knows nothing of stores or sockets."""

"""Start many ranks from one terminal: on this host, on several hosts by ssh; or list what to type to start them."""

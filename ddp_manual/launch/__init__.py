"""Many ranks from one terminal: of this host, of several hosts by way of ssh, or what to type to start them by hand."""

"""The training that the ranks do once they have met. This package uses neither stores nor sockets itself."""

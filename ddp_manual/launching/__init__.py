"""How ranks are started when not by hand. Imports neither rendezvous nor training, and no torch."""

"""What decides: who is a rank, when one is lost, what all are told. No I/O, no clock and no task below here."""

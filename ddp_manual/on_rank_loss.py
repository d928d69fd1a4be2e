"""What the ranks do when one of them is lost: the values of ``--on_loss``."""

LEAVE, WAIT, SHRINK = "leave", "wait", "shrink"

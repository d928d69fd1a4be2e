"""accelerate's own test of its collectives; without a GPU it uses several ranks only after such a state was made."""

from accelerate import PartialState
from accelerate.test_utils.scripts import test_ops

PartialState(cpu=True)
test_ops.main()

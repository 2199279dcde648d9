"""What is made while no cycles are looked for is not looked through at once afterwards."""

import gc
import weakref

from itercast.capture.base.garbage import without_garbage_collection


class Ring:
    """An object in a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_made_inside_is_old_and_is_collected_as_ever() -> None:
    """Python looks through new objects (generation 0) after every few hundred, old ones rarely."""
    with without_garbage_collection():
        ring = Ring()
        assert not gc.isenabled()
    new = any(one is ring for one in gc.get_objects(generation=0))
    old = any(one is ring for one in gc.get_objects(generation=2))
    assert (new, old, gc.isenabled()) == (False, True, True)
    seen = weakref.ref(ring)
    del ring
    gc.collect()
    assert seen() is None

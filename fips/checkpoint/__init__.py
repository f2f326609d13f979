"""Everything that touches a disk or a hub: the source checkpoint, the packed format, loading."""

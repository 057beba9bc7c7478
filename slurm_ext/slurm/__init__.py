"""The only door to Slurm: one ``Backend`` protocol, its adapters and their parsers.

Used by ``control`` and ``cli`` only. A decision never imports from here: it gets a ``Snapshot``.
"""

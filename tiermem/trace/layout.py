"""The bytes of a trace file: one header, then records of one size.

See docs/trace.md for the same in prose. All numbers are little-endian.
"""

import struct

MAGIC = b"tiermem\0"
VERSION = 1

# magic, version, state, nbytes of a record, offset of the first record, nbytes and CRC-32 of the JSON that
# follows, number of records (-1 while the file is being written).
HEADER = struct.Struct("<8sHBBIIIq")

STATE_OFFSET = 10
NUM_RECORDS_OFFSET = 24

OPEN = 0
CLOSED = 1
STOPPED = 2  # the disk was full: what happened afterwards is not in the file

# start, duration, nbytes, unit, page, step, source, target, reason, phase, 7 zero bytes, event. The event is
# last because a zero there means that nothing is written here: a writer killed in the middle of a record
# leaves a record that no reader sees.
RECORD = struct.Struct("<qqqiiiBBBB7xB")

# A file grows by windows of this size. The number divides by the record and by 64 KiB, the largest page size
# in use, so that each window can be mapped by itself and a record never lies across two.
WINDOW = 16 * 196608
assert WINDOW % RECORD.size == 0

# The first record lies at a multiple of this, for the same reason.
FIRST_RECORD_ALIGNMENT = 65536

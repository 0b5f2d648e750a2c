"""The largest numbers of the types that values have on the device."""

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
FLOAT32_MAX = 3.4028234663852886e38

"""Every formula of docs/algorithms, once, as a pure function of tensors: no `self`, no configuration, no device.

What each item counts for (`weights`) is decided by the caller, so that micro-batches and packs of one optimizer step add up.
"""

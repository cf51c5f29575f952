"""The commands, one file each; only `hesscond.cli` imports this.

`printing` is how all of them print, `options` what several of them take.
"""

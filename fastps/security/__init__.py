# SPDX-License-Identifier: Apache-2.0
"""Authentication and encryption: handshakes, the tokens that prove a role, ciphers. No sockets.

Decides what both sides of a connection prove to each other and in which order; reads and writes no
socket itself (transport/handshake_gate.py and control/dial.py carry the bytes). handshake.py has
the messages and their proofs, tokens.py the tokens of members, ciphers.py the ciphers of the
machine's libcrypto, which _cipher.pyx calls.
"""

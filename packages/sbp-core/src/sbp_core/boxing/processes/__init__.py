"""What backends of several processes are made of, but for the transport.

`call` is one call and its deadline, `process` a backend, `connections` how it breaks. `manifest`
says what a rank sends and receives, `parcel` makes flat messages of it, `exchange` is the
communicator (the latter two know torch), and `meter` counts what it hands over. How ranks learn
that one of them failed: `board` (notes to each other), `store` (one in a key-value store),
`members` (their processes) and `watch` (the thread that looks). `agree` compares a text over all
ranks, `fingerprint` every step; both serve any backend, and know torch.
"""

"""What backends of several processes are made of, but for the transport and the tensors.

`call` is one call and its deadline, `process_backend` a backend, `connections` how it breaks.
`manifest` says what a rank sends and receives, `traffic` counts what it hands over. How ranks learn
that one of them failed: `control_store` (what they leave for each other), `store_client` (one in a
key-value store), `membership` (their processes) and `failure_detector` (the thread that looks).
"""

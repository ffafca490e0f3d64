"""Record batches as bytes: headers, provenance, identities. Nothing here opens a file."""

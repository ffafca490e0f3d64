"""Record batches as bytes: headers, provenance, identities. No module here opens a file."""

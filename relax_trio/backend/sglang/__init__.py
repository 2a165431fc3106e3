"""SGLang servers as a backend: what goes over the wire, which servers there are, how they get new weights."""

"""What requests and answers say, and how the proxy adds to them and takes it back, byte for byte."""

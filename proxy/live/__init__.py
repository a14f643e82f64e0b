"""What is live: the engines in rotation, which weights answer which name, and the gate in front of them.

Read by every call; changed by publishing/ alone.
"""

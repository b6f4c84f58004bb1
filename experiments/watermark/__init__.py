"""Studies of the watermark: detection, distortion, edits, forgery, private completions."""

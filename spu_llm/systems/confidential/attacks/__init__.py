"""What a curious model owner finds out about a prompt, from what each way of protecting it shows
her. Functions here judge views (`views`); taking real ones is the command's part.
"""

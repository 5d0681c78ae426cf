def shows_work(sample):
    return 0.2 * sample.text.count("=")
def thorough(sample):
    return len(sample.token_ids) / 32

"""Run in place of a decoder of clips on a device, as `acting_decoder` is."""

import acting_decoder

if __name__ == "__main__":
    acting_decoder.run("device.films")

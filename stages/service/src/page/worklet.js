// Mixes what the microphone gives to one channel and sends it on as numbers of 16 bits, some 100 ms at a time, at the rate that
// the browser gives them in: the server brings them to that of its models.

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.block = new Int16Array(Math.round(sampleRate / 10));
    this.filled = 0;
    this.port.postMessage({ rate: sampleRate });
    this.port.onmessage = () => {
      this.send();
      this.port.postMessage({ done: true });
    };
  }

  send() {
    if (this.filled > 0) {
      const part = this.block.slice(0, this.filled);
      this.filled = 0;
      this.port.postMessage({ audio: part.buffer }, [part.buffer]);
    }
  }

  push(sample) {
    const bounded = Math.max(-1, Math.min(1, sample));
    this.block[this.filled] = Math.round(bounded * 32767);
    this.filled += 1;
    if (this.filled === this.block.length) {
      this.send();
    }
  }

  process(inputs) {
    const channels = inputs[0];
    if (!channels || channels.length === 0) {
      return true;
    }
    for (let at = 0; at < channels[0].length; at += 1) {
      let sample = 0;
      for (const channel of channels) {
        sample += channel[at] / channels.length;
      }
      this.push(sample);
    }
    return true;
  }
}

registerProcessor("capture", Capture);

"use strict";

// Mixes what the microphone gives to one channel and sends it on as numbers of 16 bits, some 100 ms at a time. Other rates than
// the server's (44.1 kHz is usual) are brought to 48 kHz by straight lines between samples; the server filters what is above 8 kHz.
const RATES = [8000, 16000, 24000, 48000];

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.rate = RATES.includes(sampleRate) ? sampleRate : 48000;
    this.step = sampleRate / this.rate;
    this.position = 0;
    this.last = 0;
    this.block = new Int16Array(Math.round(this.rate / 10));
    this.filled = 0;
    this.port.postMessage({ rate: this.rate });
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
    const count = channels[0].length;
    for (let at = 0; at < count; at += 1) {
      let sample = 0;
      for (const channel of channels) {
        sample += channel[at] / channels.length;
      }
      // Output samples between the last input sample and this one.
      while (this.position < 1) {
        this.push(this.last + (sample - this.last) * this.position);
        this.position += this.step;
      }
      this.position -= 1;
      this.last = sample;
    }
    return true;
  }
}

registerProcessor("capture", Capture);

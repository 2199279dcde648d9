// Browsers start no worker for a page that is opened from disk. There, the script of a worker runs
// in a hidden frame of the page: the search of the theme needs no more of a worker than this.
"use strict"

if (location.protocol === "file:") {
  const load = (inside, url) =>
    new Promise((loaded) => {
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = loaded
      inside.document.body.append(script)
    })

  window.Worker = class extends EventTarget {
    onmessage = null

    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write("<!doctype html><body></body>")
      inside.document.close()
      inside.postMessage = (data) => setTimeout(() => this.answer(data))
      inside.importScripts = async (...urls) => {
        for (const one of urls) await load(inside, one)
      }
      this.ready = load(inside, url)
    }

    answer(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      this.onmessage?.(event)
    }

    async postMessage(data) {
      await this.ready
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}

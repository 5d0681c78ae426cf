/* Search in pages that are opened as files: a browser gives them no worker, so its script runs in a hidden frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.scope = frame.contentWindow;
      this.receivers = [];
      this.scope.addEventListener = (kind, receive) => this.receivers.push(receive);
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => { script.onload = resolve; });
      frame.contentDocument.body.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.receivers.forEach((receive) => receive({ data })));
    }
  };
}

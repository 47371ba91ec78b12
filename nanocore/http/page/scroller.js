// Keeps the end of the messages in sight while they grow, unless the reader has scrolled up.

const NEAR_PX = 48;

export class Scroller {
  constructor(element, jump) {
    this.element = element;
    this.jump = jump;
    this.isFollowing = true;
    element.addEventListener("scroll", () => this.look(), { passive: true });
    new ResizeObserver(() => this.follow()).observe(element);
    jump.addEventListener("click", () => {
      this.toEnd();
      element.focus();
    });
  }

  /** Whoever is near the end goes on with it. */
  look() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    this.isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    this.jump.hidden = this.isFollowing;
  }

  /** There is more. */
  follow() {
    if (this.isFollowing) this.element.scrollTop = this.element.scrollHeight;
    else this.jump.hidden = false;
  }

  toEnd() {
    this.isFollowing = true;
    this.jump.hidden = true;
    this.follow();
  }
}

// Keeps the end of the messages in sight while they grow, unless the reader has scrolled up.

const NEAR_PX = 48;

export class Scroller {
  constructor(element, jump) {
    this.element = element;
    this.jump = jump;
    this.isFollowing = true;
    this.top = 0;
    element.addEventListener("scroll", () => this.look(), { passive: true });
    new ResizeObserver(() => this.follow()).observe(element);
    jump.addEventListener("click", () => {
      this.toEnd();
      element.focus();
    });
  }

  /** Whoever is near the end goes on with it; only going up leaves it, for text may grow meanwhile. */
  look() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    if (scrollHeight - scrollTop - clientHeight < NEAR_PX) this.isFollowing = true;
    else if (scrollTop < this.top) this.isFollowing = false;
    this.top = scrollTop;
    this.jump.hidden = this.isFollowing;
  }

  /** There is more. */
  follow() {
    if (this.isFollowing) this.element.scrollTop = this.element.scrollHeight;
    else this.jump.hidden = false;
  }

  /** All is drawn anew: whoever has scrolled up stays where they are. */
  around(draw) {
    const { isFollowing, element } = this;
    const { scrollTop } = element;
    draw();
    if (isFollowing) {
      this.toEnd();
      return;
    }
    this.isFollowing = false;
    this.top = element.scrollTop = scrollTop;
    this.jump.hidden = false;
  }

  toEnd() {
    this.isFollowing = true;
    this.jump.hidden = true;
    this.follow();
  }
}

//! An allocator that counts: how much a piece of work holds at once, and what it asks for at once.
#![expect(unsafe_code, reason = "an allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), SeqCst) + layout.size();
        MOST.fetch_max(held, SeqCst);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller keeps the contract of `dealloc`; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The most bytes that `work` held at once, over what was held before.
pub(crate) fn most_held(work: impl FnOnce()) -> usize {
    let before = HELD.load(SeqCst);
    MOST.store(before, SeqCst);
    work();
    MOST.load(SeqCst).saturating_sub(before)
}

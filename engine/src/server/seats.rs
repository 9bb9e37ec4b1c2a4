//! Who may hold how much of the room for bodies that are arriving.
//!
//! Short bodies need no place. A longer one takes places as its bytes come, never before. Where none is left it waits, unless another body's client
//! sent nothing for [`STILL`]: that one loses its places. The body that came first may use the last places too, so that one can always end, and no two
//! wait for each other. It reads no clock.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Instant, timeout_at};

use super::body::MAX_BYTES;

/// What a place holds; and a body up to here takes none, since connections are bounded.
const PLACE: usize = 64 << 10;
/// All places: 128 MiB.
const PLACES: usize = 2 << 10;
/// Enough for the longest body.
const RESERVED: usize = MAX_BYTES / PLACE;
/// A body whose client sent less than a place's bytes in so long stands still.
const STILL: Duration = Duration::from_secs(1);

/// The server's.
pub(super) static ROOM: LazyLock<Arc<Room>> = LazyLock::new(|| Arc::new(Room::new(PLACES)));

/// Places for bodies.
#[derive(Debug)]
pub(super) struct Room {
    held: Mutex<Held>,
    /// Told when places come free.
    freed: Arc<Notify>,
}

#[derive(Debug)]
struct Held {
    free: usize,
    next: u64,
    /// In the order of their first place.
    bodies: BTreeMap<u64, Holder>,
}

#[derive(Debug)]
struct Holder {
    places: usize,
    /// When it last asked for a place.
    moved: Instant,
    /// For a place, not for its client.
    waits: bool,
    lost: Arc<Notify>,
}

impl Room {
    fn new(places: usize) -> Self {
        Self {
            held: Mutex::new(Held {
                free: places,
                next: 0,
                bodies: BTreeMap::new(),
            }),
            freed: Arc::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// What the body may take now.
    fn usable(&self, id: u64) -> usize {
        match self.bodies.first_key_value() {
            Some((first, _)) if *first < id => self.free.saturating_sub(RESERVED),
            _ => self.free,
        }
    }

    /// The body that stands still for the longest time, and since when.
    fn stillest(&self, id: u64) -> Option<(u64, Instant)> {
        (self.bodies.iter())
            .filter(|(other, holder)| **other != id && !holder.waits)
            .map(|(other, holder)| (*other, holder.moved))
            .min_by_key(|(_, moved)| *moved)
    }

    fn remove(&mut self, id: u64) -> Option<Holder> {
        let holder = self.bodies.remove(&id)?;
        self.free += holder.places;
        Some(holder)
    }
}

/// Until when there can be no answer, and what may bring it earlier.
pub(super) struct Later {
    freed: OwnedNotified,
    until: Instant,
}

impl Later {
    /// Until another try is worth it.
    pub(super) async fn wait(self) {
        // Both ends mean the same: try again.
        let _ = timeout_at(self.until, self.freed).await;
    }
}

/// One body's places; dropped, they are free.
pub(super) struct Seat {
    room: Arc<Room>,
    /// From the first place on.
    id: Option<u64>,
    lost: Arc<Notify>,
}

impl Seat {
    /// Without a place yet.
    pub(super) fn new(room: &Arc<Room>) -> Self {
        Self {
            room: room.clone(),
            id: None,
            lost: Arc::default(),
        }
    }

    /// Resolves when another body got this one's places.
    pub(super) async fn lost(&self) {
        self.lost.notified().await;
    }

    /// Makes room for `length` bytes in all.
    ///
    /// # Errors
    /// There is none now: when to try again.
    pub(super) fn grow(&mut self, length: usize, now: Instant) -> Result<(), Later> {
        let places = (length.saturating_sub(1) / PLACE).min(RESERVED);
        if places == 0 {
            return Ok(());
        }
        let mut held = self.room.held();
        let id = *self.id.get_or_insert_with(|| {
            held.next += 1;
            held.next
        });
        let own = held.bodies.get(&id).map_or(0, |holder| holder.places);
        if places <= own {
            return Ok(());
        }
        let mut until = None;
        while held.usable(id) < places - own && until.is_none() {
            match held.stillest(id) {
                Some((other, moved)) if moved + STILL <= now => {
                    if let Some(holder) = held.remove(other) {
                        holder.lost.notify_one();
                        self.room.freed.notify_waiters();
                    }
                }
                still => until = Some(still.map_or(now, |(_, moved)| moved) + STILL),
            }
        }
        let granted = if until.is_none() { places } else { own };
        held.free -= granted - own;
        let holder = Holder {
            places: granted,
            moved: now,
            waits: until.is_some(),
            lost: self.lost.clone(),
        };
        held.bodies.insert(id, holder);
        match until {
            None => Ok(()),
            Some(until) => Err(Later {
                freed: self.room.freed.clone().notified_owned(),
                until,
            }),
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut held = self.room.held();
        if self.id.and_then(|id| held.remove(id)).is_some() {
            drop(held);
            self.room.freed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use proptest::prelude::*;

    use super::*;

    fn bytes(places: usize) -> usize {
        places * PLACE + 1
    }

    fn has_lost(seat: &Seat) -> bool {
        seat.lost().now_or_never().is_some()
    }

    #[test]
    fn bodies_that_stand_still_lose_their_places_to_one_that_moves() {
        let room = Arc::new(Room::new(RESERVED + 8));
        let start = Instant::now();
        let mut slow: Vec<Seat> = (0..10).map(|_| Seat::new(&room)).collect();
        for seat in &mut slow[..8] {
            assert!(seat.grow(bytes(1), start).is_ok());
        }
        // The first may use the last places, the others may not; short bodies need none.
        assert!(slow[0].grow(bytes(RESERVED), start).is_ok());
        assert!(slow[8].grow(bytes(1), start).is_err());
        assert!(slow[9].grow(PLACE, start).is_ok());
        let mut honest = Seat::new(&room);
        let Err(later) = honest.grow(bytes(2), start + STILL / 2) else {
            panic!("there is no place");
        };
        assert_eq!(later.until, start + STILL);
        assert!(honest.grow(bytes(2), start + STILL).is_ok());
        assert!(has_lost(&slow[0]) && !has_lost(&slow[7]) && !has_lost(&slow[8]));
    }

    #[test]
    fn a_place_that_comes_free_wakes_who_waits() {
        let room = Arc::new(Room::new(RESERVED));
        let now = Instant::now();
        let (mut first, mut second) = (Seat::new(&room), Seat::new(&room));
        assert!(first.grow(bytes(1), now).is_ok());
        let Err(later) = second.grow(bytes(1), now) else {
            panic!("the rest is the first one's");
        };
        let mut wait = Box::pin(later.freed);
        assert!(wait.as_mut().now_or_never().is_none());
        drop(first);
        assert!(wait.now_or_never().is_some());
        assert!(second.grow(bytes(1), now).is_ok());
    }

    proptest! {
        /// Clients that all send: whatever the order, nobody loses a place, no more is held than there is, and all end.
        #[test]
        fn bodies_that_move_all_arrive(
            lengths in prop::collection::vec(1..=MAX_BYTES, 1..12),
            order in prop::collection::vec(any::<prop::sample::Index>(), 200),
        ) {
            let room = Arc::new(Room::new(RESERVED + 40));
            let now = Instant::now();
            let mut bodies: Vec<(Seat, usize, usize)> = lengths.iter().map(|length| (Seat::new(&room), 0, *length)).collect();
            let mut turns = order.iter().cycle();
            let mut idle = 0;
            while !bodies.is_empty() {
                let at = turns.next().unwrap().index(bodies.len());
                let (seat, sent, length) = &mut bodies[at];
                let next = (*sent + 3 * PLACE / 2).min(*length);
                let grown = seat.grow(next, now).is_ok();
                prop_assert!(!has_lost(seat));
                if grown {
                    idle = 0;
                    *sent = next;
                    if next == *length {
                        bodies.swap_remove(at);
                    }
                } else {
                    idle += 1;
                    prop_assert!(idle < 10_000, "all wait for each other");
                }
                let held: usize = room.held().bodies.values().map(|holder| holder.places).sum();
                prop_assert_eq!(held + room.held().free, RESERVED + 40);
            }
        }
    }
}

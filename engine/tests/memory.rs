//! What reading a prompt allocates in each memory mode, counted by the allocator.
//!
//! One test, so that nothing else allocates beside it.

#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use mixquant_crds::{DecodeScheme, PrecisionPlan, PrefillScheme, WeightCopies};
use mixquant_engine::model::{Chunk, LogitRows, Model, Pass, Workspace};

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

fn add(bytes: usize) {
    let now = NOW.fetch_add(bytes, Ordering::SeqCst) + bytes;
    PEAK.fetch_max(now, Ordering::SeqCst);
}

#[expect(unsafe_code, reason = "an allocator cannot be written without")]
// SAFETY: every call is passed on to the system's allocator unchanged; only sizes are added up.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that one more prefill needs at its peak, after one that filled every buffer.
fn prefill_peak(model: &Model) -> usize {
    let prompt: Vec<u32> = (0..128).map(|at| 300 + at * 7).collect();
    let mut workspace = Workspace::default();
    let mut read = || {
        let mut cache = model.new_cache(prompt.len());
        let chunk = Chunk {
            tokens: &prompt,
            cache: &mut cache,
            logits: LogitRows::Last,
        };
        model
            .forward(Pass::Prefill, &mut [chunk], &mut workspace, None)
            .unwrap();
    };
    read();
    let before = NOW.load(Ordering::SeqCst);
    PEAK.store(before, Ordering::SeqCst);
    read();
    PEAK.load(Ordering::SeqCst) - before
}

#[test]
fn on_the_fly_takes_less_than_one_layer_more_and_no_second_copy() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m");
    let mut model = Model::open(&directory).unwrap();
    let mut plan = PrecisionPlan::precise(DecodeScheme::BF16);
    plan.prefill.scheme = PrefillScheme::W8A8;
    let mut attach = |model: &mut Model, copies| {
        plan.weight_copies = copies;
        let linears = model.linears_of(&plan);
        let bytes: usize = (linears.prefill)
            .iter()
            .map(|linear| linear.weight.out_features * linear.weight.in_features)
            .sum();
        model.attach(linears, None, plan.clone()).unwrap();
        bytes
    };
    let linears = attach(&mut model, WeightCopies::Dual);
    let layer = linears / model.config().num_hidden_layers;
    let (held_dual, dual) = (NOW.load(Ordering::SeqCst), prefill_peak(&model));
    attach(&mut model, WeightCopies::OnTheFly);
    let (held_made, made) = (NOW.load(Ordering::SeqCst), prefill_peak(&model));
    // A tenth for what threads keep for themselves, whichever of them worked.
    assert!(
        held_dual - held_made >= linears / 10 * 9,
        "the copy is gone: {held_dual} then {held_made}"
    );
    assert!(made > dual, "something is made");
    assert!(
        made - dual <= layer,
        "{} bytes of scratch, {layer} in a layer's copy",
        made - dual
    );
    assert!(model.weight_bytes().scratch <= layer);
}

//! What engine pods tell of themselves: a metrics page on the admin port of an address of the loopback for each, good or slow by its image.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use mixquant_crds::names::PORT_ADMIN;
use mixquant_crds::names::engine_metrics::{PROCESS_START_TIME, REQUEST_TIME_PER_OUTPUT_TOKEN};

/// Requests a second that each pod answers while there is traffic.
const RATE: f64 = 2000.0;

/// The pages of all pods of a life.
pub struct Pages {
    next: AtomicU32,
    traffic: Arc<AtomicBool>,
    /// By address; the task that answers ends with its pod.
    pods: Mutex<BTreeMap<Ipv4Addr, tokio::task::AbortHandle>>,
}

/// Addresses of one process come from one block, those of a life from a part of it.
static LIVES: AtomicU32 = AtomicU32::new(0);

impl Pages {
    /// Pages of a new life.
    #[expect(
        clippy::new_without_default,
        reason = "each call takes another part of the block: no two are alike"
    )]
    pub fn new() -> Self {
        let life = LIVES.fetch_add(1, Ordering::Relaxed);
        Self {
            next: AtomicU32::new((life << 6) + 1),
            traffic: Arc::default(),
            pods: Mutex::default(),
        }
    }

    /// Requests come, or none do.
    pub fn set_traffic(&self, on: bool) {
        self.traffic.store(on, Ordering::Relaxed);
    }

    /// A page for a new pod; the address that answers it.
    ///
    /// # Errors
    /// An address that is taken.
    pub async fn add(&self, slow: bool) -> anyhow::Result<Ipv4Addr> {
        let number = self.next.fetch_add(1, Ordering::Relaxed) & 0xffff;
        let block = 100 + std::process::id() % 100;
        let [_, _, high, low] = number.to_be_bytes();
        let address = Ipv4Addr::new(127, u8::try_from(block)?, high, low);
        let listener = TcpListener::bind((address, PORT_ADMIN)).await?;
        let page = Page {
            slow,
            traffic: Arc::clone(&self.traffic),
            seen: Mutex::new((Instant::now(), 0.0)),
            start: f64::from(number) + 1.0,
        };
        let task = tokio::spawn(answer(listener, page));
        let mut pods = self.pods.lock().expect("no holder of this lock panics");
        pods.insert(address, task.abort_handle());
        Ok(address)
    }

    /// The pod is gone.
    pub fn remove(&self, address: Ipv4Addr) {
        let mut pods = self.pods.lock().expect("no holder of this lock panics");
        if let Some(task) = pods.remove(&address) {
            task.abort();
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for task in self
            .pods
            .lock()
            .expect("no holder of this lock panics")
            .values()
        {
            task.abort();
        }
    }
}

struct Page {
    slow: bool,
    traffic: Arc<AtomicBool>,
    /// When the page was last asked for, and the requests by then.
    seen: Mutex<(Instant, f64)>,
    start: f64,
}

impl Page {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a count of requests"
    )]
    fn text(&self) -> String {
        let mut seen = self.seen.lock().expect("no holder of this lock panics");
        if self.traffic.load(Ordering::Relaxed) {
            seen.1 += seen.0.elapsed().as_secs_f64() * RATE;
        }
        seen.0 = Instant::now();
        let all = seen.1 as u64;
        let fast = if self.slow { 0 } else { all };
        let bucket = |bound: &str, count: u64| {
            format!("{REQUEST_TIME_PER_OUTPUT_TOKEN}_bucket{{le=\"{bound}\"}} {count}\n")
        };
        [
            format!("{PROCESS_START_TIME} {}\n", self.start),
            bucket("0.01", 0),
            bucket("0.02", fast),
            bucket("0.05", fast),
            bucket("0.1", fast),
            bucket("0.2", fast),
            bucket("0.5", all),
            bucket("+Inf", all),
        ]
        .concat()
    }
}

async fn answer(listener: TcpListener, page: Page) {
    while let Ok((mut socket, _)) = listener.accept().await {
        let mut request = [0; 2048];
        let text = page.text();
        let head = format!(
            "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            text.len()
        );
        if socket.read(&mut request).await.is_ok() {
            drop(socket.write_all((head + &text).as_bytes()).await);
        }
    }
}
